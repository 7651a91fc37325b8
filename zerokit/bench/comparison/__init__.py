"""Comparisons of benches as figures and text; the command line and the page render them.

`cells` groups and matches records, `differences` compares them beside the noise, `conditions` says what differed around
them, `losses` whether they trained the same; `figures` writes numbers, `tables` and `headlines` what is shown first.
"""
