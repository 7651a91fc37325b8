"""What a person sees in a terminal: tables, trees, progress, and the lines of a plan or a report.

`screen` has the consoles and the tables that all others use; each other module shows one kind of result. It renders
records, plans, reports and summaries with rich, and knows no command and no option.
"""
