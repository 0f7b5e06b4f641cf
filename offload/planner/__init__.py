"""What a run will be, before there is one: bytes of every tier, seconds of a step, and what to change first.

hardware   a machine in numbers, probed or described
shape      a model in numbers: units, what each computes, what a backward keeps
memory     what goes where, by the functions that a run uses
timing     a step played by `simulate`
bound      the least that it can take
choice     homes and host budget where the user names none, and what to change first
report     all of it in words and as JSON
foresee    a run that is about to begin, on the probed machine
"""
