"""What a training run needs beside its algorithm: folders, metrics, checkpoints, statistics, figures, environments."""
