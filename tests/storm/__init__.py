"""One storm over the whole engine: a random run in random weather, against the same run in calm memory.

    plan      what is drawn from a seed: the model, its tiers and options, what the loop does, what the weather does
    division  what ranks divide beside states: sequences, layers, stages of a pipeline
    weather   drives that are late, fail, rot, fill up or lose power, kills, Ctrl-C
    life      one process of the run: it trains until it has ended, or the weather ends it
    trial     the lives of a run, one after the other, and what must be true of what they wrote
    outside   another storm, over the installed command alone, which imports nothing of the package

`python -m tests.storm --minutes 5` draws one seed after the other; a failure prints the command that repeats it.

A storm leaves the order of threads to the machine. Three more modules own it, in small steps:

    scheduler      lets one thread run at a time, and chooses which
    interleavings  steps of an engine under orders that a seed draws
    heartbeats     the same of ranks that notice the loss of others
"""
