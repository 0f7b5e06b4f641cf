"""Parameters between and during their uses: placeholders, views, hooks, edits."""
