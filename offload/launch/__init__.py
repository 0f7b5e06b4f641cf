"""From a hostfile and some options to the `torchrun` of each host: `offload launch`.

    hosts         which hosts there are, and which slots of them a run uses: DeepSpeed's hostfile, Slurm's list of nodes
    commands      one command a host, decided from hosts, options and environment
    processes     these commands as processes that end together
    torchrun      on each host: torchrun, with meeting places that are closed to others
    environment   the ranks that srun or mpirun has started without torchrun, by torchrun's variables

`hosts`, `commands` and `environment` compute from what they are given; `processes` and `torchrun` act.
"""
