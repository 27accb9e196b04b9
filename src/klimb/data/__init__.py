"""From data files to tokenised prompts: `rows` (what a row must hold), `files` (readers), `chat` (text to
tokens and back), `prompts` (limits, and the stream that the loop draws from)."""
