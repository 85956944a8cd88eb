"""One training script, and what starts it: torchrun, Slurm, Kubernetes, Ray Train. See docs/scaling.md."""
