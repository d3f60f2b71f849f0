"""Bridges to other libraries' formats. Nothing here imports those libraries, and nothing imports these modules unasked.

``tpoverlap.integrations.transformers``: tensors of a Hugging Face Llama checkpoint.
"""
