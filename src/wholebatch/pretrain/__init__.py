"""What `wholebatch train` runs: a language model, from data to report, on top of the public library.

text → tokens → rows of step n → Accumulator.step → metrics, checkpoints → report
"""
