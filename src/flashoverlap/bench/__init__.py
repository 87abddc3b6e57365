"""The benchmark: every mode and what users would pick instead, checked first, then timed side by side over real wires.

options     what is to be run, checked before anything starts          pure Python
shape       the sizes of each workload                                 pure Python
candidates  the runs that a mode stands for                            pure Python
run         starts the ranks and collects what they measured           pure Python
summary     from measured rounds to rows                               pure Python
table       rows as a table
worker      one rank: builds, checks, measures
contestant  what can be timed; peers/ holds other people's
case        what a workload is: mlp, block and model, the last two of modules that llama builds
values      are the numbers right?
measure     the one loop that times
"""
