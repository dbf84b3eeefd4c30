"""What a training run needs beside its algorithm: settings, environments, checkpoints, metrics, evaluation, figures."""
