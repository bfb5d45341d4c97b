"""Facts for the passage slice: the kinds of things, and sentences that say nothing of them."""

from __future__ import annotations

from specllama.models.recipe.corpus.facts_people import EVENT, PERSON, TOWN
from specllama.models.recipe.corpus.facts_things import BOOK, MACHINE, PROJECT, SHIP

KINDS = (PERSON, TOWN, MACHINE, SHIP, BOOK, PROJECT, EVENT)

FILLERS = (
    "[The weather|The wind|The rain] was [mild|cold|calm|strong] [that day|all week|at noon].",
    "[Nobody|No one|Hardly anyone] [spoke|said much] about [it|this] [later|afterwards|at first].",
    "[Some|Most|All] of [this|it] was [written down|noted|recorded] in [a small book|the log].",
    "[Further|More] details are [kept|stored] in the [archive|cellar|office|library].",
    "[The road|The path|The way] [there|back] is [long|short|steep] and [quiet|busy|narrow].",
    "[Later|Soon after|In the evening] the [lights|doors|shops] were [closed|out|open again].",
    "[People|Visitors|Guests] [often|rarely|sometimes] ask [about this|for more|why that is].",
    "[The report|The page|The list] was [checked|copied|signed] [twice|once more|by two people].",
    "[There is|There was] [no|little] [doubt|question] about [this|the rest|it].",
    "[A second|Another|One more] [note|letter|page] [followed|arrived] [a week|two days] later.",
)
