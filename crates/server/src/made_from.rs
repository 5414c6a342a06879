//! Types of answers that are made from others.

/// Declares a type with the expression of each field, and its conversion from another type.
macro_rules! made_from {
    (
        $(#[$meta:meta])*
        $type_visibility:vis struct $name:ident from $source:ident: $from:ty $(where $let:ident = $value:expr;)? {
            $($(#[$field_meta:meta])* $visibility:vis $field:ident: $type:ty = $expression:expr,)*
        }
    ) => {
        $(#[$meta])*
        $type_visibility struct $name {
            $($(#[$field_meta])* $visibility $field: $type,)*
        }

        impl From<$from> for $name {
            fn from($source: $from) -> Self {
                $(let $let = $value;)?
                Self { $($field: $expression),* }
            }
        }
    };
}
pub(crate) use made_from;
