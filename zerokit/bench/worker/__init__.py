"""The program of a rank: `torchrun … -m zerokit.bench.worker JOB.json`."""
