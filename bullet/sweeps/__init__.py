"""Many runs: sweeps over axes of the configuration, goodput by bisection, steady state, the fluid bound; docs/sweeps.md."""
