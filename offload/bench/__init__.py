"""Benchmarks of the components, each against a bound or a peer measured in the same run: `offload bench …`."""
