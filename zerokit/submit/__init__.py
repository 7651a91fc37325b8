"""Jobs handed to a queue, which starts their ranks: rendered, submitted, and followed to their end.

    slurm        a batch script for sbatch
    kubernetes   a Kubeflow TrainJob or a JobSet for kubectl; its record is fetched from the log of node 0
    following    waits for a job of either; a signal cancels it

The job's command is a bench with `--launcher env`.
"""
