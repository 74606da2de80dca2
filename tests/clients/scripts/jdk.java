// The JDK's HttpClient at its defaults, which offers HTTP/2 on every plain connection.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.List;
import java.util.stream.Collectors;

class Script {
    static final String BASE = System.getenv("BASE");
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String CHAT =
        "{\"model\": \"stand-in\", \"messages\": [{\"role\": \"user\", \"content\": \"%s\"}]%s}";

    static HttpResponse<String> post(String path, String body, boolean chunked) throws Exception {
        var publisher = chunked
            ? BodyPublishers.fromPublisher(BodyPublishers.ofString(body))
            : BodyPublishers.ofString(body);
        var request = HttpRequest.newBuilder(URI.create(BASE + path))
            .header("Content-Type", "application/json").POST(publisher).build();
        return CLIENT.send(request, BodyHandlers.ofString());
    }

    static String answer(String path, String body, boolean chunked) throws Exception {
        var response = post(path, body, chunked);
        check(response.statusCode() == 200, path + ": " + response.statusCode() + response.body());
        check(response.version() == HttpClient.Version.HTTP_1_1, path);
        return response.body();
    }

    static void check(boolean holds, String what) {
        if (!holds) throw new AssertionError(what);
    }

    public static void main(String[] arguments) throws Exception {
        var models = HttpRequest.newBuilder(URI.create(BASE + "/v1/models")).build();
        check(CLIENT.send(models, BodyHandlers.ofString()).body().contains("stand-in"), "models");
        var large = "Hi ".repeat(30_000);
        for (boolean chunked : List.of(false, true)) {
            var path = "/v1/chat/completions";
            check(answer(path, CHAT.formatted("Hi", ""), chunked).contains("Hello"), path);
            var text = "{\"model\": \"stand-in\", \"prompt\": \"Hi\", \"max_tokens\": 16}";
            check(answer("/v1/completions", text, chunked).contains("Hello"), "completions");
            var response = "{\"model\": \"stand-in\", \"input\": \"Hi\"}";
            check(answer("/v1/responses", response, chunked).contains("Hello"), "responses");
            var message = CHAT.formatted("Hi", ", \"max_tokens\": 64");
            check(answer("/v1/messages", message, chunked).contains("Hello"), "messages");
            var refused = post(path, CHAT.formatted(large, ""), chunked);
            check(refused.statusCode() == 400, "too long: " + refused.statusCode());
            check(refused.body().contains("context_length_exceeded"), refused.body());
        }
        var streamed = HttpRequest.newBuilder(URI.create(BASE + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(BodyPublishers.ofString(CHAT.formatted("Hi", ", \"stream\": true"))).build();
        var lines = CLIENT.send(streamed, BodyHandlers.ofLines()).body()
            .collect(Collectors.toList());
        check(lines.contains("data: [DONE]"), "the end of the stream");
    }
}
