"""What the kernels of every device share: softmax and sparsemax."""
