"""What a run will need, on paper: arithmetic on a recipe, without torch and without a device."""
