"""Records in MLflow."""
