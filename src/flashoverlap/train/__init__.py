"""Training a language model in parallel: ``flashoverlap train``, or ``examples/train.py`` under torchrun.

``program`` is what every rank runs; the command puts a lab around it. ``options``, ``degrees``, ``text`` and
``preflight`` load no torch, so that arguments are refused at once.
"""
