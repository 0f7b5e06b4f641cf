"""From a hostfile and some options to the `torchrun` of each host: `offload launch`.

    hosts         the hosts and slots of a run, from DeepSpeed's hostfile or Slurm's list of nodes
    commands      one command per host, from hosts, options and environment
    processes     runs these commands as processes that end together
    torchrun      on each host: torchrun, with rendezvous that are closed to other users
    environment   torchrun's variables for ranks that srun or mpirun has started without torchrun

`hosts`, `commands` and `environment` only compute from their arguments; `processes` and `torchrun` start processes.
"""
