"""Tests of what trains: any modules, graphs and libraries of models."""
