"""The processes that train together: who they are, how they join, what they agree on, how one is missed."""
