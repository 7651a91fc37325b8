"""What a rank does: `torchrun … -m zerokit.bench.worker JOB.json`."""
