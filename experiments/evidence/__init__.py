"""Evidence on models of natural text: many texts, intervals, settings chosen on other texts than those that
are reported. `natural` measures, `selection` chooses settings, `page` writes, `coverage` tests intervals;
`pretrained` does it all for a user's model, `shared` makes a table of such runs."""
