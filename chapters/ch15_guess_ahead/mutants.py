"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "draws again from p after a refusal": ("np.maximum(p[i] - q[i], 0)", "p[i]"),
    "takes what the guesser has too much of": ("p[i] - q[i]", "q[i] - p[i]"),
    "does not ask how often it is guessed": ("coins[i] * q[i, guess]", "coins[i]"),
    "refuses whatever the guesser likes more than the model": ("coins[i] * q[i, guess]", "q[i, guess]"),
    "believes every guess": (">= p[i, guess]", "> 1"),
    "goes on behind a refusal": (
        "            return [*out, race(noise[i], missing)]\n        out.append(guess)",
        "            guess = race(noise[i], missing)\n        out.append(guess)",
    ),
    "drops what was right together with what was wrong": (
        "return [*out, race(noise[i], missing)]",
        "return [race(noise[i], missing)]",
    ),
    "gives nothing behind the last guess": ("return [*out, race(noise[len(guesses)], p[len(guesses)])]", "return out"),
    "takes the last token from another place": ("p[len(guesses)])]", "p[0])]"),
}
