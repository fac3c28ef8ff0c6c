"""What attention heads do, measured on their weights and on text (arXiv 2605.18826)."""
