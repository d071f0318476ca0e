"""Slipstream: asynchronous reinforcement learning of Mixture-of-Experts language models, as independent gRPC services.

What every service and every user's program shares. Importing it loads neither torch nor transformers.
"""

__version__ = "0.1.0"
