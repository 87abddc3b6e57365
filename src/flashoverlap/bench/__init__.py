"""The benchmark: every mode and what users would pick instead, checked first, then timed side by side over real wires.

options          what is to be run, checked before anything starts          pure Python
shapes/          the sizes of each workload                                 pure Python
candidates       the runs that a mode stands for                            pure Python
run              starts the ranks and collects what they measured           pure Python
summary          from measured rounds to rows                               pure Python
table            rows as a table
worker           one rank: builds, checks, measures
contestant       what can be timed; peers/ holds other people's
case             what a workload is: mlp, attention and ulysses; block and model, of modules that llama builds
dense_attention  what references of attention are made of
data_parallel    what workloads of training steps are: stack and llm
matmul_clock     what of a step hides behind no matmul
values           are the numbers right?
measure          the one loop that times
"""
