"""Prompts in other languages than English, none about code: asked of drafters that learned English code alone."""

LANGUAGES: dict[str, tuple[str, ...]] = {
    "German": (
        "Erkläre in einfachen Worten, wie ein Regenbogen entsteht.",
        "Nenne drei Tipps für einen gesunden Schlaf.",
        "Schreibe einen kurzen Absatz über den Winter in den Bergen.",
        "Warum ist der Himmel blau?",
    ),
    "French": (
        "Explique simplement comment poussent les plantes.",
        "Donne trois conseils pour apprendre une langue étrangère.",
        "Écris un court paragraphe sur la ville de Lyon.",
        "Pourquoi les oiseaux migrent-ils en hiver ?",
    ),
    "Spanish": (
        "Explica con palabras sencillas qué es un volcán.",
        "Da tres consejos para cuidar un jardín pequeño.",
        "Escribe un párrafo corto sobre el mar.",
        "¿Por qué es importante beber agua?",
    ),
    "Italian": (
        "Spiega in modo semplice come si fa il pane.",
        "Elenca tre cose da vedere a Roma.",
        "Scrivi un breve paragrafo sulla primavera.",
        "Perché la luna cambia forma?",
    ),
    "Portuguese": (
        "Explique de forma simples o que é a gravidade.",
        "Dê três dicas para economizar energia em casa.",
        "Escreva um parágrafo curto sobre a música brasileira.",
        "Por que as abelhas são importantes?",
    ),
    "Dutch": (
        "Leg in eenvoudige woorden uit hoe een fiets werkt.",
        "Noem drie redenen om elke dag te wandelen.",
        "Schrijf een korte alinea over de zee.",
        "Waarom regent het?",
    ),
    "Polish": (
        "Wyjaśnij prostymi słowami, czym jest fotosynteza.",
        "Podaj trzy pomysły na tani obiad.",
        "Napisz krótki akapit o jesieni.",
        "Dlaczego warto czytać książki?",
    ),
    "Russian": (
        "Объясни простыми словами, почему идёт снег.",
        "Назови три причины заниматься спортом.",
        "Напиши короткий абзац о весне.",
        "Почему море солёное?",
    ),
}
"""By language, four prompts each."""
