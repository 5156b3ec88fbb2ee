"""Serve models with experts on disk: OpenAI's protocol, a page that shows loads, and live curves of a training."""
