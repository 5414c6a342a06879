//! Templates that try to hang, to eat the memory or to overflow the stack: all of them end with an error, soon.

use std::time::{Duration, Instant};

use paguro_model::chat::{ChatInput, ChatTemplate, TemplateError, TemplateTokens};
use serde_json::json;

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = json!([{"role": "user", "content": "x".repeat(10_000)}]);
    ChatTemplate::new(source, TemplateTokens::default())?.render(&ChatInput::new(messages))
}

fn check_fails(source: &str) {
    let shown: String = source.chars().take(120).collect();
    let start = Instant::now();
    let result = render(source);
    let took = start.elapsed();
    assert!(result.is_err(), "{shown}: {} bytes", result.map_or(0, |text| text.len()));
    println!("{:6} ms, {:?}: {shown}", took.as_millis(), result.unwrap_err());
    // Generous, for a busy machine: without a bound, these take hours.
    assert!(took < Duration::from_secs(60), "{shown} took {took:?}");
}

#[test]
fn endless_loops_run_out_of_fuel() {
    check_fails("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}");
    check_fails("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}");
    check_fails("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    check_fails("{{ range(1000000000)|length }}");
    check_fails(
        "{% set x = messages[0].content * 1000 %}{% for a in range(99999) %}{{ 'y' in x }}{% endfor %}",
    );
    check_fails(
        "{% set x = messages[0].content * 1000 %}{% for a in range(99999) %}{{ x == x ~ '' }}{% endfor %}",
    );
    check_fails("{% set x = range(99999) %}{% for a in range(99999) %}{{ -1 in x }}{% endfor %}");
}

#[test]
fn growth_is_bounded() {
    for grow in [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x * 2",
        "[ns.x, ns.x]|join",
        "ns.x|replace('x', 'xx')",
        "'%s%s' % (ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "ns.x.join([ns.x, ns.x])",
        "ns.x.replace('x', 'xx')",
        "[ns.x, ns.x]|string",
        "{'a': ns.x, 'b': ns.x}|tojson",
        "ns.x|escape ~ ns.x",
        "ns.x.center(ns.x|length * 2)",
        "(ns.x ~ '\n' ~ ns.x)|indent(ns.x|length)",
        "(ns.x|list + ns.x|list)|join",
    ] {
        check_fails(&format!(
            "{{% set ns = namespace(x='x') %}}{{% for i in range(99999) %}}{{% set ns.x = {grow} %}}{{% endfor %}}"
        ));
    }
    check_fails(
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    );
    check_fails(
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    );
    check_fails(
        "{% set ns = namespace(x=(1,)) %}{% for i in range(99999) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
    );
    check_fails("{% set __budget = 10 ** 15 %}{{ 'x' * 10000000000 }}");
    check_fails("{{ 'x' * 10000000000 }}");
    check_fails("{{ [1] * 10000000000 }}");
    check_fails("{{ 'x'.center(10000000000) }}");
    check_fails("{{ 'x'.zfill(10000000000) }}");
    check_fails("{{ 'x'|center(10000000000) }}");
    check_fails("{{ 'x\ny'|indent(10000000000) }}");
    check_fails("{{ '%10000000000d' % 1 }}");
    check_fails("{{ '%*d' % (10000000000, 1) }}");
    check_fails("{{ '{:10000000000}'.format(1) }}");
    check_fails("{{ '{:{}}'.format(1, 10000000000) }}");
    check_fails("{{ [1]|batch(10000000000, 1)|list }}");
    check_fails("{{ [1]|slice(10000000000, 1)|list }}");
    check_fails("{{ [[[1]]]|tojson(indent=10000000000) }}");
    check_fails("{% for i in range(99999) %}{{ messages[0].content }}{{ messages[0].content }}{% endfor %}");
    check_fails(
        "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{{ messages[0].content }}{% endfor %}{% endset %}",
    );
    let text = "t".repeat(1 << 20);
    check_fails(&format!("{{% set x %}}{{% for i in range(99999) %}}{text}{{% endfor %}}{{% endset %}}"));
}

#[test]
fn nesting_is_bounded() {
    let nested = |open: &str, close: &str| format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
    check_fails(&format!("{{{{ {} }}}}", nested("(", ")")));
    check_fails(&format!("{{{{ {} }}}}", nested("[", "]")));
    check_fails(&format!("{{{{ {} }}}}", nested("{1:", "}")));
    check_fails(&format!("{{{{ {}1 }}}}", "-".repeat(100_000)));
    check_fails(&format!("{{{{ {} }}}}", nested("f(", ")")));
    check_fails(&format!("{{{{ x{} }}}}", nested("[", "]")));
    check_fails(&format!("{{% set {} = 1 %}}", nested("(", ")")));
    check_fails(&format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(100_000)));
    check_fails(&nested("{% if 1 %}", "{% endif %}"));
    check_fails(&nested("{% for x in [1] %}", "{% endfor %}"));
    for nest in
        ["[ns.x]", "(ns.x,)", "{'a': ns.x}", "namespace(x=ns.x)", "namespace({'x': ns.x})", "dict(x=ns.x)"]
    {
        check_fails(&format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(99999) %}}{{% set ns.x = {nest} %}}{{% endfor %}}"
        ));
    }
    check_fails("{% set ns = namespace() %}{% set ns.x = ns %}{% set ns.y = [ns] %}");
    check_fails("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}");
    check_fails(
        "{% macro f(n) %}{% for x in [1] %}{% if 1 %}{{ f(n + 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(0) }}",
    );
}

/// Templates that append to one string, or look back at all messages from each, take time with the square of the chat.
#[test]
fn long_chats_are_fine() {
    let messages: Vec<_> = (0..1000).map(|_| json!({"role": "user", "content": "x".repeat(1000)})).collect();
    let input = ChatInput::new(messages.into());
    let render = |source: &str| ChatTemplate::new(source, TemplateTokens::default()).unwrap().render(&input);
    let append = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}";
    assert_eq!(render(append).map(|text| text.len()), Ok(1_000_000));
    let look_back = "{% for m in messages %}{% for n in messages[:loop.index] %}{% if n.role != 'user' %}!{% endif %}{% endfor %}{% endfor %}";
    assert_eq!(render(look_back), Ok(String::new()));
}

#[test]
fn long_flat_expressions_are_fine() {
    let sum = |operator: &str| vec!["1"; 1500].join(operator);
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" + "))), Ok("1500".into()));
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" ~ "))), Ok("1".repeat(1500)));
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" and "))), Ok("1".into()));
    assert_eq!(
        render(&format!("{{{{ {}|length }}}}", "''|trim".to_owned() + &"|trim".repeat(100))),
        Ok("0".into())
    );
}
