"""`python -m zerokit.bench.worker JOB.json`: one rank."""

import sys
from pathlib import Path

from zerokit.bench.worker.rank import main

main(Path(sys.argv[1]))
