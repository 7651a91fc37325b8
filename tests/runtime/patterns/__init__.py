"""Ways to train that people use, each beside plain torch at every stage."""
