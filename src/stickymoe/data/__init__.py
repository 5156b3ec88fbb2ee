"""Text in, batches out: corpora, tokenizers, the token cache and the order in which a run sees its tokens."""
