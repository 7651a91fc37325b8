"""Jobs handed to a queue, which starts their ranks: rendered, submitted, and followed to their end.

    slurm        a batch script for sbatch
    kubernetes   a Kubeflow TrainJob or a JobSet for kubectl; its record is fetched from the log of node 0
    jobs         what both are asked for, and waiting for the end; a signal cancels a job

The job's command is a bench with `--launcher env`, or torchrun with a program of the user's.
"""
