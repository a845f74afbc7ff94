"""The stages of the trainer image, a module each. They share nothing but what lies beside this folder."""
