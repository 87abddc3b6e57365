"""FlashOverlap: hide the communication of distributed training and inference behind its computation, and prove it."""
