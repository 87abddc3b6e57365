"""What a training step costs on a cluster that need not be there: published devices, models' shapes, and estimates made
by the planner that plans real calls."""
