"""Comparisons of benches as figures and text; the command line and the page render them.

`cells` groups and matches records and says what differed around them, `differences` compares them beside the noise, and
their losses; `tables` is what is shown: numbers, columns, headlines.
"""
