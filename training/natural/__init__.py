"""Two language models of about 80M parameters, trained on real text and on the small worlds."""
