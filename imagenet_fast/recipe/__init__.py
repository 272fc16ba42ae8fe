"""Define what is trained: the recipe, its batch split and the job.

No module here imports torch.
"""
