"""The timeline of one step on all ranks, as a trace that Perfetto and Chrome open.

spans     what took place on one rank, from when to when, by the clock of its host or of its device
recorder  notes them during a step: what the collectives tell, and the phases of the step
modules   notes units' forward, recomputation and backward, by hooks on the modules that announce them
events    the file: Trace Event JSON
step      runs the extra step that is traced
"""
