"""Model classes in the layout that SGLang's registry reads: one ``EntryClass`` a module."""
