"""Training a language model under tensor parallelism: ``flashoverlap train``, or ``examples/train.py`` under torchrun.

``program`` is what every rank runs; the command puts a lab around it. ``options``, ``text`` and ``preflight`` load no
torch, so that arguments are refused at once.
"""
