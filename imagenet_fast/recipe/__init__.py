"""What is trained: a recipe, the batch it asks for, the job made of it. Nothing here imports torch."""
