"""Update rules and the strategies by which the update worker steps units. `registry` lists all rules."""
