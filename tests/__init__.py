"""Tests of what is no lesson. A package, so that no other package of this name is found first."""
