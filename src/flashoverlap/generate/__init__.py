"""Text from a language model under tensor parallelism: what ``flashoverlap generate`` runs.

options   what is to be generated, checked before anything starts
folder    what a checkpoint folder says of its model without loading it
text      text to tokens and back, piece by piece
load      a model of a folder whose ranks hold their own slices
weights   tensors in safetensors files, read slice by slice
trained   weights of a checkpoint of training
decode    prefill, and cached decode one token at a time
worker    one rank
run       starts the ranks and shows the text as it comes
table     what it cost
"""
