"""Lets ranks start with the libraries loaded: importing them takes each rank longer than most of these tests."""

from tests.support import distributed

# Without effect where ranks have been started before, or where a library is missing.
distributed.PRELOAD.append("tests.integrations.trainers")
