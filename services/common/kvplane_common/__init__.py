"""What every program of the cluster shares."""
