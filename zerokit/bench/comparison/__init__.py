"""Benches beside each other, from records to a page.

`runs` finds records, `cells` groups and matches them, `differences` sets them beside the noise, `figures` writes
numbers, `plots` draws with the shapes of `drawing`, `charts` chooses what is drawn, `tables` and `page` what is said,
`report` writes the HTML.
"""
