"""Expert parallelism: how the tokens of a mixture-of-experts layer reach the ranks that hold their experts, and come back."""
